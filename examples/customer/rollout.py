"""How a training run plays an episode: the agent as it is, a simulated customer, the verifier."""

from agent import Shop, serve
from simulated_customer import Customer
from verifier import verify


async def play(task, episode):
    shop = Shop(task.payload["orders"])
    customer = Customer(task.payload["wish"], episode.client, model="customer")
    await serve(await customer.opening(), customer.answer, episode.client, shop)
    return verify(task, shop.orders)
