"""q/k norm, rotary embedding and the write of keys and values into the page pool."""
