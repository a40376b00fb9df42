"""Other people's checkpoints: recognised by content, read without executing anything, and put into a Store's folder or a fresh run.

    open_source(source) -> Foreign -> understand(state) -> Parts -> put into live objects (live.py), or saved as they are

One file per format. A file is data here and nothing else: what would need code from it is refused, with the lines that re-save it.
"""
