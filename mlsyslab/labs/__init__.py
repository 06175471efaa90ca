"""The labs. A lab may use the shared modules, never another lab."""
