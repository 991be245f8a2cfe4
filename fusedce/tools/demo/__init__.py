"""One model trained three ways, compared."""
