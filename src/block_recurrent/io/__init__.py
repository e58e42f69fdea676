"""Reading and writing files: written atomically, and verified before use."""
