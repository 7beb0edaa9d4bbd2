"""One inference server: SGLang, or the torch server for laptops."""
