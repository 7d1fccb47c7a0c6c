"""What the machine is, and how this process uses it: device, threads, torch's switches, precision, facts."""
