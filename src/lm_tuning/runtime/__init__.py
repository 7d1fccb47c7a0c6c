"""What the machine is, and how this process uses it: device, threads, torch's switches, dtypes, facts.

Promises that what is set is read back and told with its reason, and that variables that a user has set are kept. May
import ``parameters``, ``errors``, ``secrets`` and ``wording``. Each module is an entry of its own.
"""
