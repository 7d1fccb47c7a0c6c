"""What the machine is, and how this process uses it: device, threads, torch's switches, dtypes, facts.

May import ``parameters``, ``errors``, ``secrets`` and ``wording``. Each module is an entry of its own.
"""
