"""A model on several devices of one process: stages of layers in a row, and rows that go round them in lanes."""
