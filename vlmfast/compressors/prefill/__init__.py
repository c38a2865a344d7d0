"""Methods that drop visual tokens between the language model's layers, during prefill."""
