// llama_prompt tokens MODEL TEXT COUNT: the first COUNT tokens of a text, one line of numbers
// llama_prompt time|loss MODEL TOKENS FLASH THREADS ROUNDS: these tokens as a prompt of llama.cpp, ROUNDS times
//
// FLASH is on or off. Prints one line of JSON: the seconds of each prompt (512 tokens at a time, the cache emptied in
// between), or the mean loss of the tokens of its second half. Before the first one 16 tokens are read, so that it does
// not wait for the model's file. A backend takes part if GGML_BACKEND_PATH says so. bench/prompt.py compiles and calls
// it.
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kBatch = 512, kWarm = 16;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "llama_prompt: %s\n", what.c_str());
  std::exit(2);
}

int Number(const char* text, const std::string& what) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != 0 || value < 0 || value > (1 << 20)) Fail(what + " " + text + " is no number from 0 to 1048576");
  return static_cast<int>(value);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) Fail(path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

llama_model* Load(const char* path) {
  llama_model* model = llama_model_load_from_file(path, llama_model_default_params());
  if (model == nullptr) Fail(std::string(path) + " cannot be read");
  return model;
}

void PrintTokens(const llama_model* model, const std::string& path, int count) {
  const std::string text = ReadFile(path);
  std::vector<llama_token> tokens(text.size() + 8);
  const int found =
      llama_tokenize(llama_model_get_vocab(model), text.data(), static_cast<int>(text.size()), tokens.data(),
                     static_cast<int>(tokens.size()), /*add_special=*/true, /*parse_special=*/false);
  if (found < count)
    Fail(path + " has " + std::to_string(found) + " tokens, " + std::to_string(count) + " are asked for");
  for (int i = 0; i < count; ++i) std::printf("%d%c", tokens[i], i + 1 < count ? ' ' : '\n');
}

double Loss(const float* logits, int count, llama_token next) {
  const float top = *std::max_element(logits, logits + count);
  double sum = 0;
  for (int v = 0; v < count; ++v) sum += std::exp(static_cast<double>(logits[v] - top));
  return std::log(sum) + static_cast<double>(top - logits[next]);
}

class Prompt {
 public:
  Prompt(llama_model* model, std::vector<llama_token> tokens, bool flash, int threads) : tokens_(std::move(tokens)) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(tokens_.size());
    params.n_batch = params.n_ubatch = kBatch;
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    context_ = llama_init_from_model(model, params);
    if (context_ == nullptr) Fail("no context");
    vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
    batch_ = llama_batch_init(kBatch, 0, 1);
    Read(std::min(kWarm, Count()), false);
  }
  ~Prompt() {
    llama_batch_free(batch_);
    llama_free(context_);
  }

  double Seconds() {
    const auto begin = std::chrono::steady_clock::now();
    Read(Count(), false);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  // Mean over the tokens after the first half, each foreseen from all before it.
  double MeanLoss() { return Read(Count(), true) / (Count() - 1 - Count() / 2); }

 private:
  int Count() const { return static_cast<int>(tokens_.size()); }
  bool IsJudged(int token) const { return token >= Count() / 2 && token + 1 < Count(); }

  double Read(int count, bool judge) {
    double loss = 0;
    llama_memory_clear(llama_get_memory(context_), true);
    for (int begin = 0; begin < count; begin += kBatch) {
      batch_.n_tokens = std::min(kBatch, count - begin);
      for (int i = 0; i < batch_.n_tokens; ++i) {
        batch_.token[i] = tokens_[begin + i];
        batch_.pos[i] = begin + i;
        batch_.n_seq_id[i] = 1;
        batch_.seq_id[i][0] = 0;
        batch_.logits[i] = judge ? IsJudged(begin + i) : begin + i + 1 == count;
      }
      if (llama_decode(context_, batch_) != 0) Fail("llama_decode failed");
      for (int i = 0; judge && i < batch_.n_tokens; ++i) {
        if (IsJudged(begin + i)) loss += Loss(llama_get_logits_ith(context_, i), vocabulary_, tokens_[begin + i + 1]);
      }
    }
    llama_synchronize(context_);
    return loss;
  }

  std::vector<llama_token> tokens_;
  llama_context* context_ = nullptr;
  llama_batch batch_;
  int vocabulary_ = 0;
};

void Measure(llama_model* model, char** argv) {
  std::istringstream numbers(ReadFile(argv[3]));
  const std::vector<llama_token> tokens{std::istream_iterator<llama_token>(numbers), {}};
  if (tokens.size() < 4) Fail(std::string(argv[3]) + " has fewer than 4 tokens");
  const std::string flash = argv[4];
  if (flash != "on" && flash != "off") Fail("FLASH " + flash + " is neither on nor off");
  const int rounds = Number(argv[6], "ROUNDS");
  Prompt prompt(model, tokens, flash == "on", Number(argv[5], "THREADS"));
  const bool timed = std::string(argv[1]) == "time";
  std::printf("{\"%s\": [", argv[1]);
  for (int i = 0; i < rounds; ++i)
    std::printf("%s%.8f", i == 0 ? "" : ", ", timed ? prompt.Seconds() : prompt.MeanLoss());
  std::printf("]}\n");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  if (!(verb == "tokens" && argc == 5) && !((verb == "time" || verb == "loss") && argc == 7))
    Fail("usage: tokens MODEL TEXT COUNT | time MODEL TOKENS FLASH THREADS ROUNDS | loss ... (the same)");
  ggml_backend_load_all();
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model* model = Load(argv[2]);
  if (verb == "tokens") {
    PrintTokens(model, argv[3], Number(argv[4], "COUNT"));
  } else {
    Measure(model, argv);
  }
  llama_model_free(model);
}
