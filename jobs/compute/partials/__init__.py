"""From a batch's rows to one partial per key, with columns as the state declares them."""
