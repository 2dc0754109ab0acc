// Heartbeats from a native thread (ftar_core/wire/heartbeat.py).
