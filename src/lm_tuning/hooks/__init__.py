"""Kedro hooks: what happens around a run. Each is imported by its own module, so none brings another's packages."""
