// The conversation of chat mode: the messages so far, and how they look.

const $ = (id) => document.getElementById(id);

export const conversation = {
  messages: [],

  /** The messages of a request that asks the next question. */
  with: (question) => [...conversation.messages, { role: "user", content: question }],

  /** Keep a question and its answer. */
  add(question, answer) {
    conversation.set([...conversation.with(question), { role: "assistant", content: answer }]);
  },

  set(messages) {
    conversation.messages = messages;
    const names = { user: "You", assistant: "Model", system: "System" };
    $("messages").replaceChildren(
      ...messages.map(({ role, content }) => {
        const item = document.createElement("li");
        item.className = `message ${role}`;
        const name = document.createElement("b");
        name.textContent = names[role];
        item.append(name, content.trim());
        return item;
      }),
    );
    $("conversation").hidden = !messages.length;
    $("messages").scrollTop = $("messages").scrollHeight;
  },
};
