// llama_answer MODEL TEXT [PROMPT STEPS]: what a backend does to an answer in llama.cpp, and what it costs.
//
// Reads PROMPT tokens (7168) of a text in batches of 512 and then STEPS (500) one by one, and prints the mean loss of
// the latter, how many of them were foreseen, and the milliseconds of a step. Then edits the cache as programs do (a
// shifted context, replaced tokens, drafts that are refused, two sequences, another state) and prints the loss after
// each edit. Run it with SPARGE_DECODE=0 and 1 and compare:
//
// clang-format off
//   g++ -O2 -std=c++17 -I$LLAMA/include -I$LLAMA/ggml/include bench/llama_answer.cc -o llama_answer
//       -L$BIN -Wl,-rpath,$BIN -lllama -lggml -lggml-base
//   SPARGE_DECODE=0 sparge llama -- ./llama_answer model.gguf text.txt
// clang-format on
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

constexpr int kBatch = 512, kSequences = 2;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "llama_answer: %s\n", what.c_str());
  std::exit(2);
}

// A context, and the text that it is fed with.
class Reader {
 public:
  Reader(llama_model* model, const std::string& path, int room) : vocab_(llama_model_get_vocab(model)) {
    std::ifstream file(path);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    tokens_.resize(text.size() + 8);
    const int count = llama_tokenize(vocab_, text.data(), static_cast<int>(text.size()), tokens_.data(),
                                     static_cast<int>(tokens_.size()), true, true);
    if (count < room)
      Fail(path + " has " + std::to_string(count) + " tokens, and " + std::to_string(room) + " are needed");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = room;
    params.n_batch = params.n_ubatch = kBatch;
    params.n_threads = params.n_threads_batch = 2;
    params.n_seq_max = kSequences;
    params.kv_unified = true;
    context_ = llama_init_from_model(model, params);
    if (context_ == nullptr) Fail("no context");
    batch_ = llama_batch_init(kBatch, 0, 1);
  }
  ~Reader() {
    llama_batch_free(batch_);
    llama_free(context_);
  }

  llama_context* context() { return context_; }
  llama_memory_t memory() { return llama_get_memory(context_); }
  int position = 0, token = 0;  // of the next one: in the sequence, in the text

  void Add(int token_of_text, int at, int sequence, bool logits) {
    const int i = batch_.n_tokens++;
    batch_.token[i] = tokens_[token_of_text];
    batch_.pos[i] = at;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = sequence;
    batch_.logits[i] = logits;
  }
  void Decode() {
    if (llama_decode(context_, batch_) != 0) Fail("llama_decode failed");
    batch_.n_tokens = 0;
  }
  void ReadPrompt(int count) {
    for (int i = 0; i < count; ++i) {
      Add(token++, position++, 0, false);
      if (batch_.n_tokens == kBatch || i + 1 == count) Decode();
    }
  }
  // Of a token of the text, by the logits of the batch's i-th query.
  double Loss(int i, int token_of_text) {
    const float* logits = llama_get_logits_ith(context_, i);
    const int count = llama_vocab_n_tokens(vocab_);
    const float* top = std::max_element(logits, logits + count);
    double sum = 0;
    for (int v = 0; v < count; ++v) sum += std::exp(static_cast<double>(logits[v] - *top));
    foreseen += top - logits == tokens_[token_of_text] ? 1 : 0;
    return std::log(sum) + static_cast<double>(*top - logits[tokens_[token_of_text]]);
  }
  void Steps(const char* name, int count, int sequence = 0) {
    double loss = 0;
    for (int i = 0; i < count; ++i) {
      Add(token++, position++, sequence, true);
      Decode();
      loss += Loss(0, token);
    }
    std::printf("%-14s %.5f\n", name, loss / count);
  }
  int foreseen = 0;

 private:
  const llama_vocab* vocab_;
  std::vector<llama_token> tokens_;
  llama_context* context_;
  llama_batch batch_;
};

// The end of the sequence goes, and the text goes on elsewhere.
void Replace(Reader& reader, int count, int ahead) {
  reader.position -= count;
  llama_memory_seq_rm(reader.memory(), 0, reader.position, -1);
  reader.token += ahead;
}

void Drafts(Reader& reader) {
  constexpr int kDrafted = 5, kTaken = 2, kTimes = 12;
  double loss = 0;
  for (int i = 0; i < kTimes; ++i) {
    for (int j = 0; j < kDrafted; ++j)
      reader.Add(reader.token + j + (j < kTaken ? 0 : 50), reader.position + j, 0, true);
    reader.Decode();
    for (int j = 0; j < kTaken; ++j) loss += reader.Loss(j, reader.token + j + 1);
    reader.position += kTaken;
    reader.token += kTaken;
    llama_memory_seq_rm(reader.memory(), 0, reader.position, -1);
  }
  std::printf("%-14s %.5f\n", "drafts", loss / (kTimes * kTaken));
}

void TwoSequences(Reader& reader) {
  constexpr int kSteps = 40, kAhead = 300;
  llama_memory_seq_cp(reader.memory(), 0, 1, -1, -1);
  double loss = 0;
  for (int i = 0; i < kSteps; ++i) {
    for (int s = 0; s < kSequences; ++s) reader.Add(reader.token + s * kAhead, reader.position, s, true);
    reader.Decode();
    for (int s = 0; s < kSequences; ++s) loss += reader.Loss(s, reader.token + s * kAhead + 1);
    ++reader.token;
    ++reader.position;
  }
  std::printf("%-14s %.5f\n", "two sequences", loss / (kSteps * kSequences));
  llama_memory_seq_rm(reader.memory(), 0, -1, -1);
  reader.token += kAhead;
  reader.Steps("one of them", 40, 1);
}

void LoadState(Reader& reader) {
  std::vector<uint8_t> state(llama_state_get_size(reader.context()));
  llama_state_get_data(reader.context(), state.data(), state.size());
  const int position = reader.position, token = reader.token;
  reader.token += 500;
  reader.Steps("another way", 70, 1);
  llama_state_set_data(reader.context(), state.data(), state.size());
  reader.position = position;
  reader.token = token;
  reader.Steps("state loaded", 40, 1);
}

void Edit(Reader& reader) {
  constexpr int kRemoved = 500;
  reader.ReadPrompt(3000);
  reader.Steps("steps", 70);
  llama_memory_seq_rm(reader.memory(), 0, 100, 100 + kRemoved);
  llama_memory_seq_add(reader.memory(), 0, 100 + kRemoved, -1, -kRemoved);
  reader.position -= kRemoved;
  reader.Steps("shifted", 70);
  Replace(reader, 1, 5);
  reader.Steps("1 replaced", 40);
  Replace(reader, 30, 100);
  reader.Steps("30 replaced", 40);
  Drafts(reader);
  reader.Steps("after drafts", 20);
  TwoSequences(reader);
  LoadState(reader);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 5) Fail("usage: llama_answer MODEL TEXT [PROMPT STEPS]");
  const int prompt = argc == 5 ? std::atoi(argv[3]) : 7168, steps = argc == 5 ? std::atoi(argv[4]) : 500;
  if (prompt < 1 || steps < 1) Fail("PROMPT and STEPS are numbers of tokens");
  ggml_backend_load_all();
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) Fail(std::string(argv[1]) + " cannot be read");
  {
    Reader reader(model, argv[2], prompt + steps + 1);
    reader.ReadPrompt(prompt);
    const auto begin = std::chrono::steady_clock::now();
    reader.Steps("loss", steps);
    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    std::printf("foreseen %d of %d, %.2f ms for a step\n\nafter edits\n", reader.foreseen, steps, ms / steps);
  }
  Reader reader(model, argv[2], 6144);
  Edit(reader);
}
