"""The privileged side: agent, hub, socket, flight ring, clock; and the command line."""
