"""Right are the orders that the customer wanted, whatever was said on the way."""


def verify(task, orders):
    return float(orders == task.payload["wanted"])
