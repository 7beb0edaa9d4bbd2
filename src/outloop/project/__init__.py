"""What `outloop init` writes into a new folder."""
