"""The main job end to end: a real model is trained, killed, damaged, moved to other ranks, and proven to end in the same bits."""
