"""The same work through other libraries, one noun per file. A peer that is not installed says what to install."""
