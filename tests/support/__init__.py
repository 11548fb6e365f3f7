"""Real traffic and its truth: network namespaces, packet loss, loads, kernel counters."""
