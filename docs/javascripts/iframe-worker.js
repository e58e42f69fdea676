// Search in a site opened from disk. Browsers start no workers from file://, so the theme's search runs in a hidden frame.
"use strict";

class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inside = this.frame.contentWindow;
    inside.document.open();
    inside.document.write(`<script>
      postMessage = (data) => parent.postMessage(data, "*");
      importScripts = (...urls) => urls.reduce((last, url) => last.then(() => new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.onload = resolve;
        script.onerror = reject;
        script.src = url;
        document.body.appendChild(script);
      })), Promise.resolve());
    </script><body><script src="${url}"></script>`);
    inside.document.close();
    this.ready = new Promise((resolve) => inside.addEventListener("load", resolve));
    this.listener = (event) => {
      if (event.source !== this.frame.contentWindow) return;
      const copy = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(copy);
      if (this.onmessage) this.onmessage(copy);
    };
    addEventListener("message", this.listener);
  }

  postMessage(data) {
    const inside = this.frame.contentWindow;
    this.ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
  }

  terminate() {
    removeEventListener("message", this.listener);
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = window.IFrameWorker = IFrameWorker;
