// Text that goes on from a prompt, token by token as it comes, and what generates it.

export class Text {
  constructor($, headers, refresh) {
    Object.assign(this, { $, headers, refresh, stopping: null });
    $("generate").addEventListener("click", () => (this.stopping ? this.stopping.abort() : this.ask()));
  }

  show(model) {
    if (this.model?.name !== model.name) {
      this.stopping?.abort();
      this.$("text").textContent = "";
    }
    this.model = model;
    this.$("text-card").hidden = !model.generation;
    if (model.generation) this.tell(model.generation);
  }

  tell(state) {
    const ms = (seconds) => (seconds ? `${(seconds * 1e3).toPrecision(3)} ms` : "–");
    this.$("tokens").textContent = String(state.tokens);
    this.$("first-token").textContent = ms(state.first_token_s);
    this.$("next-token").textContent = ms(state.token_s);
    this.$("generating").textContent = `${state.running} + ${state.waiting}`;
    this.$("cache").textContent = `${Math.round(state.cache_used * 100)} %`;
  }

  async ask() {
    const { $ } = this, { name } = this.model;
    this.stopping = new AbortController();
    $("generate").textContent = "Stop";
    $("text").replaceChildren(Object.assign(document.createElement("b"), { textContent: $("prompt").value }));
    try {
      const answer = await fetch("generate", {
        method: "POST",
        signal: this.stopping.signal,
        headers: this.headers({ "Content-Type": "application/json" }),
        body: JSON.stringify({
          model: name,
          prompt: $("prompt").value,
          max_tokens: Number($("max-tokens").value),
          temperature: Number($("temperature").value),
          stream: true,
        }),
      });
      if (!answer.ok) throw new Error((await answer.json()).error);
      await this.follow(answer.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch (error) {
      if (error.name !== "AbortError") this.say(`\n${error.message}`, "problem");
    } finally {
      this.stopping = null;
      $("generate").textContent = "Go on";
      this.refresh();
    }
  }

  async follow(reader) {
    let rest = "", isFirst = true;
    for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const told = JSON.parse(event.slice(event.indexOf("data: ") + 6));
        if (told.error) throw new Error(told.error);
        if (told.text) this.say(told.text);
      }
      if (isFirst) this.refresh();
      isFirst = false;
    }
  }

  say(text, className = "") {
    this.$("text").append(Object.assign(document.createElement("span"), { textContent: text, className }));
  }
}
