"""How a training run plays an episode: the agent as it is, a customer, the verifier."""

from agent import Shop, serve
from simulated_customer import ModelCustomer, ScriptedCustomer
from verifier import verify


async def play(task, episode):
    """The customer is a script."""
    return await talk(task, episode, ScriptedCustomer(task.payload["wish"]))


async def play_with_model(task, episode):
    """The customer is the model that `[router.upstreams.customer]` names."""
    customer = ModelCustomer(task.payload["wish"], episode.client, model="customer")
    return await talk(task, episode, customer)


async def play_with_frozen(task, episode):
    """The customer is the policy as it was before training, on a server of its own."""
    customer = ModelCustomer(task.payload["wish"], episode.client, model="policy@frozen")
    return await talk(task, episode, customer)


async def talk(task, episode, customer):
    shop = Shop(task.payload["orders"])
    await serve(await customer.opening(), customer.answer, episode.client, shop)
    return verify(task, shop.orders)
