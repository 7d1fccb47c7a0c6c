"""Load the model that is trained, put adapters on it, and freeze what is not trained.

Entry: ``model.set_up_model``.
"""
