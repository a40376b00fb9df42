"""The whole state of a training process as named pieces, and back: state trees, the stack of live objects, random streams, facts."""
