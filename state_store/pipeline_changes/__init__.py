"""A pipeline is registered, declared otherwise, rebuilt or retired."""
