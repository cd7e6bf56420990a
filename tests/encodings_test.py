"""What is compiled for an instruction set has only instructions of that set: a processor stops at any other, and the machines that
tests run on mostly have them all. Read from the machine code of the library.

    encodings_test.py OBJDUMP LIBRARY
"""

import re
import subprocess
import sys
import unittest

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
X86 = re.compile(r"^ +[0-9a-f]+:\t((?:[0-9a-f]{2} )+) *(?:\t(.*))?$")
ARM = re.compile(r"^ +([0-9a-f]+):\t[0-9a-f]{8} +\t(.*)$")
ARM_PRODUCTS = {"smlal": 4, "smlal2": 4, "smull": 4, "smull2": 4, "sdot": 16, "usdot": 16}
EVEX = 0x62  # the first byte of an instruction of AVX-512; nothing else of 64 bits begins with it


def functions(objdump, library):
    """(name, [(bytes, or on ARM address; text)]) of every function."""
    lines = subprocess.run([objdump, "-d", "-C", library], check=True, capture_output=True, text=True).stdout.splitlines()
    name, code = None, []
    for line in lines:
        if found := FUNCTION.match(line):
            if name is not None:
                yield name, code
            name, code = found[1], []
        elif found := X86.match(line):
            if found[2] is not None:  # the rest of a long instruction has no text
                code.append((bytes.fromhex(found[1]), found[2]))
        elif found := ARM.match(line):
            code.append((int(found[1], 16), found[2]))
    if name is not None:
        yield name, code


def instructions_per_product(code):
    """Of the loop of a function of ARM that multiplies most, among those that have no loop or branch inside."""
    places = {address: place for place, (address, _) in enumerate(code)}
    best = (0, 1.0)
    for end, (_, text) in enumerate(code):
        found = re.match(r"(?:b\.|cbn?z|tbn?z)\S*\s.*?([0-9a-f]+) <", text)
        begin = places.get(int(found[1], 16), end) if found else end
        mnemonics = [text.split()[0] for _, text in code[begin : end + 1]]
        if begin < end and not any(re.match(r"b$|b\.|cbn?z|tbn?z", m) for m in mnemonics[:-1]):
            products = sum(ARM_PRODUCTS.get(m, 0) for m in mnemonics)
            best = max(best, (products, len(mnemonics) / max(products, 1)))
    return best[1]


class Encodings(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.functions = list(functions(*cls.arguments))

    def of(self, namespace):
        return [(name, code) for name, code in self.functions if f"::{namespace}::" in name]

    def uses(self, code, *mnemonics):
        return any(text.replace("{vex} ", "").split()[0] in mnemonics for _, text in code if text)

    def test_avx2_has_nothing_of_avx512(self):
        found = self.of("N_AVX2")
        if not found:
            self.skipTest("not x86")
        self.assertGreater(sum(len(code) for _, code in found), 10000)
        for name, code in found:
            for raw, text in code:
                first = raw.lstrip(b"\x2e\x3e\x66")[:1]  # what aligns loops may stand before it
                self.assertNotEqual(first, bytes([EVEX]), f"{name}: {text}")
                self.assertIsNone(re.search(r"%[zy]mm(1[6-9]|[23][0-9])|%zmm|%k[0-7]", text), f"{name}: {text}")

    def test_the_baseline_has_no_vectors_beyond_128_bits(self):
        found = self.of("N_EMU128")
        for name, code in found:
            for _, text in code:
                self.assertIsNone(re.search(r"%[yz]mm", text), f"{name}: {text}")
        if any("::N_AVX2::" in name for name, _ in self.functions):
            self.assertGreater(len(found), 20)

    def test_dot_products_are_where_their_processors_are_asked_for(self):
        x86 = bool(self.of("N_AVX2"))
        with_dots = set()
        for name, code in self.functions:
            for mnemonics, namespaces in (
                (("vpdpbusd", "vpdpwssd"), r"N_AVX3_DL|Vnni"),
                (("sdot",), r"Sdot"),
                (("usdot",), r"Usdot"),
            ):
                if self.uses(code, *mnemonics):
                    self.assertRegex(name, namespaces)
                    with_dots.update(re.findall(r"(N_AVX3_DL|N_AVX2|Sdot|Usdot)", name))
        self.assertEqual(with_dots, {"N_AVX3_DL", "N_AVX2"} if x86 else {"Sdot", "Usdot"})

    def test_vex_and_evex_say_the_same(self):
        """The loops of AVX-VNNI are those of AVX-512 VNNI but for the width and the encoding."""
        if not self.of("N_AVX2"):
            self.skipTest("not x86")
        for _, code in self.of("N_AVX2"):
            for raw, text in code:
                if "vpdpbusd" in text or "vpdpwssd" in text:
                    self.assertEqual(raw[0], 0xC4, text)  # VEX
                    self.assertRegex(text, r"%ymm")
        wide = [raw[0] for _, code in self.of("N_AVX3_DL") for raw, text in code if "vpdpbusd" in text]
        self.assertEqual(set(wide), {EVEX})

    def test_dot_products_of_arm_save_instructions(self):
        """Counted in the inner loops of QK and PV. They took 4.6 times fewer when they were written."""
        if self.of("N_AVX2"):
            self.skipTest("not ARM")
        for verb in ("Scores", "AddProducts"):
            loops = {
                precision: instructions_per_product(code)
                for name, code in self.of("N_NEON")
                for precision in re.findall(rf"::{verb}<.*?::Precision(I8\w*)>", name)
            }
            self.assertEqual(set(loops), {"I8", "I8Sdot", "I8Usdot"})
            for dots in ("I8Sdot", "I8Usdot"):
                self.assertLess(4 * loops[dots], loops["I8"], verb)


if __name__ == "__main__":
    Encodings.arguments = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1])
