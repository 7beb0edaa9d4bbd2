"""A small inference server with SGLang's HTTP contract, for machines without a GPU."""
