"""Writing to disk: files and folders that appear whole or not at all."""
