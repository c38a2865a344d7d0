"""The model `tiny`: drawn scenes, tokenizer, training and export."""
