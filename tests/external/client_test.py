import http.server
import threading
import time

from jaxrl_tis.external import client


def test_a_connection_that_was_idle_is_not_used_again(monkeypatch):
    """The engine may be closing it: uvicorn does after 5 s."""
    ports = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open

        def do_GET(self):
            ports.append(self.client_address[1])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    assert client.IDLE_SECONDS < 5
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, url = True, f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        for seconds, connections in ((2.0, 1), (0.01, 2)):
            monkeypatch.setattr(client, "IDLE_SECONDS", seconds)
            ports.clear()
            engine = client.Client(url)
            engine.get("/health")
            time.sleep(0.05)
            engine.get("/health")
            assert len(set(ports)) == connections
        server.shutdown()
