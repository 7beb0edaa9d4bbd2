"""Facts about the machine of a part: GPUs, their libraries, ports, network, memory, parent."""
