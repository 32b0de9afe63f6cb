"""ShopWorld: purchases in a generated shop or in WebShop's own, with WebShop's reward."""

from agent_r1.tasks.shop_world.environment import ShopWorldEnv

__all__ = ["ShopWorldEnv"]
