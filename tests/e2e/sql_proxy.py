"""A cable between a gateway and a SQL server that loses chosen answers, or delays them."""
import threading
import time

from store_faults import Cable

QUIET_SECONDS = 0.15  # an answer is all there when the server has said nothing more for so long


class LossyCable(Cable):
    """`lose(when)`: of the next connection on which the client sends bytes that `when` accepts, the server's answer to them goes
    nowhere, and then the connection breaks: what was asked has been done, and nobody is told. `skip`: so many answers after that
    request still arrive. `lost`: what was asked when answers were lost. `delay`: seconds by which answers come late."""

    def __init__(self, server):
        self.lost = []
        self.delay = 0.0
        self._state = threading.Lock()
        self._wanted = None  # (when, skip, times)
        self._marked = {}    # the server's side of a connection -> [requests to come before the one at fault, its bytes]
        super().__init__(server)

    def lose(self, when, skip=0, times=1):
        with self._state:
            self._wanted = (when, skip, times)

    def stop_losing(self):
        with self._state:
            self._wanted = None

    def pump(self, source, sink, outward):
        """One direction of one connection, until it ends."""
        if outward:
            for data in self.flow(source):
                self._asked(sink, data)
                sink.sendall(data)
            return
        for data in self.flow(source):
            if self.delay:
                time.sleep(self.delay)
            with self._state:
                at_fault = self._marked.get(source)
                if at_fault and at_fault[0] <= 0:
                    self.lost.append(at_fault[1])
                else:
                    at_fault = None
            if at_fault is None:
                sink.sendall(data)
                continue
            source.settimeout(QUIET_SECONDS)
            try:
                while source.recv(1 << 16):
                    pass
            except TimeoutError:
                pass
            return

    def _asked(self, far, data):
        with self._state:
            if far in self._marked:
                self._marked[far][0] -= 1
                self._marked[far][1] = data
            elif self._wanted and self._wanted[0](data):
                when, skip, times = self._wanted
                self._wanted = (when, skip, times - 1) if times > 1 else None
                self._marked[far] = [skip, data]
