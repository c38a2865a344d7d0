"""What tests share: models, media, fakes, references and comparisons."""
