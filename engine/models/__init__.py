"""What a model family is: weight names and layouts, Hugging Face folders, random weights."""
