"""Where the time of a step goes: a trace of a few steps, summed up by what it is for.

Entry: ``profiling.profile_training``.
"""
