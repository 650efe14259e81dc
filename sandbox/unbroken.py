"""Work that comes to its end, whoever is cancelled while they wait for it.

to_its_end, in_thread    they wait all the same: who goes away leaves nothing half done, and may close what it used
left_alone               they do not wait, and neither does the end of this process, with which it ends
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")


async def to_its_end(work: Awaitable[_T]) -> _T:
    """Do it; whoever is cancelled meanwhile, however often, waits for its end first."""
    doing = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        while not doing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([doing])
        if not doing.cancelled():
            doing.exception()  # nobody else is told
        raise


async def in_thread(work: Callable[[], _T]) -> _T:
    """Do what waits for a disk, or computes, without holding up the loop; otherwise as above."""
    return await to_its_end(asyncio.get_running_loop().run_in_executor(None, work))


async def left_alone(work: Callable[[], _T]) -> _T:
    """Have a thread of its own do what may take minutes, and leaves nothing that another try would not clear up."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def tell(result: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type] # it is one

    def do() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001, whoever waits is told
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=do, daemon=True).start()
    return await done
