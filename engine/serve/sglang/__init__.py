"""SGLang as a server of a run."""
