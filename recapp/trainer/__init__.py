"""The only room with Lightning: module, data module, strategy, callbacks."""
