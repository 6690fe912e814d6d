"""What every HTTP interface of this package is made from: operations, access, problem details, listener, client."""
