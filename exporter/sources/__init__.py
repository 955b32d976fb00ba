"""Where lines come from: inputs, wrappers of container runtimes, and the fast scan."""
