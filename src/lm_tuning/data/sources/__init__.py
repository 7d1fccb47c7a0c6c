"""What a path stands for: files, folders, patterns, addresses and hub data sets, with digests of their content.

Knows no rows. Entry: ``describe.describe_files``.
"""
