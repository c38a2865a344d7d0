"""The only door of the tests to the engine and to private names.

When the engine changes, this folder changes, and few tests do: a function here says what a test
wants to know or to do, not how the engine is built.
"""
