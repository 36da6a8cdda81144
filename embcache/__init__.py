"""embcache: embedding tables larger than accelerator memory."""
