"""ShopWorld: buying in a generated shop (or WebShop's own), paid as WebShop pays."""

from agent_r1.tasks.shop_world.environment import ShopWorldEnv

__all__ = ["ShopWorldEnv"]
