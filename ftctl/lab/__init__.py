"""The lab: a whole cluster on one Linux machine, made of network namespaces, real agents and real training."""
