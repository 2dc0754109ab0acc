"""The agent's only door to the operating system: netlink, sysfs, processes, clocks, namespaces."""
