"""The pure order of a run: which sample and which random stream belongs to which unit, and how units are summed. Numpy only."""
