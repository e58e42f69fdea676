"""Streams of segments for training and evaluation, from the documents of a corpus."""
