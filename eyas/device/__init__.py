"""The machine: devices and threads, memory, copies between host and device."""
