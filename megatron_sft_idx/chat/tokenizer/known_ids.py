"""The tokenizers and characters for which gigatoken is known to give the ids of tokenizers."""

from __future__ import annotations

import zlib
from base64 import b85decode
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# Split patterns of common byte-level tokenizers, by the family that introduced them.
KNOWN_SPLITS = {
    "llama3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen3.5": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

# The time to load gigatoken is quadratic in the longest added token: half a minute at 30,000 characters.
LONGEST_ADDED_NBYTES = 512

# The code points assigned in Unicode 13.0 of 2020; the tables of all libraries in use are newer. As 32-bit numbers: how
# many code points are unassigned, how many after these are assigned, and so on. Python's own table is not suitable: it
# differs between Python releases, and may be newer than those of a library.
ASSIGNED = (
    b"c-oy<OOI4V6uxy|ef#!vMwnr`XSzo+%;-G8VHjX!)SjS#fe<42AQHj?B+;NIvXE$uVdFwbOf=DGbY)l?-6$r85aZ()NZiQ6H49g2T%c9fcj%9k+oC"
    b"Qi)wk-@sq^^GqdEwJ;N>U?LOZ8+#CDYIFf`U-zG(bB9eDb!m?P}(up_gh4L*)v#f}N=|AKiH=T6yCw__K+7cn<LH;!+S!|__SV?DlyvGy6hGtkQz!"
    b"8+>`K{mHvR`fA=7@~2%6Z{@i`lduzbYEC7vp$JB9}({o_6&Uw*^v`XnRGJ$aKFf(EBc6N8YD{<JW7iGPWILJY5PW?jRx3v7&3-rU$#lCWHxkfq-+>"
    b"Lj~M(lAHKr?hwDLGQ+khLZelG{`w}xDt+Q`)?2ioKn-|z^5P!yUto#~6b}j#s`WD<aai*pAhw*!Z!kHl%ShiI8Bg0xwK5@RdAM`FCY%1_$f_Z~l9|"
    b"diq)>G17;&;-Heb}GE+6;Xg$}cs@@m+xoj^8<RyPb7jl=XYn_uaw2J126isP)~LCt<r5bbTV|=V>>882bIAxT8k#Sb^Qj$luihTu7`RCp)GzHwd38"
    b"-7^O}?ZI9bbP{h>%3bcRS@NHgYaaV8su7OvLC~$?>;%3mO0GKAT|RusjsxJg06u4d!Bu=WFt3vQ!Z#y*{=mI$bGx0VmEAMtPd&PzTUL0h6Cd||m#Q"
    b"ZcXQ#-XA?m5%H3BZ0z?tKH0s6li`WjV1E?ZaX<H((V5Aznx??CT`0r=lZd8dxJEEAsp@B9+(l)Q5kx?aPY;HQUu!To8-H;47(n2+F$==IYXZ>Ni~p"
    b"Lam+W5&nAW%%$a<=a{48xhWSf^HAyD%Q`!#vRZfr2ZtP_?LU@Do>q;EywAuP|ZblUIqWxRJ?vX=Vcqk{vzh*H+s5ff#DK#NHAK;=Vn0P@+xBOjPbb"
    b"ZVQ;$~_mF-P&r5`F$!js)^M=a(S765?J8(^Bd*oCvt5|QTd%3p}3|o@~uTW3GdE+S+XA&!$?KqEo6v4g?_%B9XDFY7)<&zG0Yyw>!IQvNXZ;JTDu&"
    b"Kk_Hekx}c+26*_<KfhHbYFO%AWJ8FOuKVZ|uWa$Ll_2uLSswkaxsqJ;XzddLsQlpVNKO1j!InA0*iBAveuX-6#WB5uI-nUQ0ylejl>qQN-F3e7A(X"
    b"&5+66J8k-PYF72XA!1nUK8u_)4qc^=9>m=p_<uL~N8Se|^6N77QyKJhd`{52s)Bv-+uDGBf$NCW!(FgTPCea!?b8kArBL<K+#e^Z2bCW8O_x`RrbG"
    b"C0d@sSDQb%3<Jpvs>?iw(-LiXDZzlZcTX(DI4Jb2QM!@xnNa#p7F?5Ovb;4G)y9s)1Y7qm%_!@%O-@|k{}UZA?3Q+}9KcCQ1Y+WzwtE4*GN`=#WAk"
    b"n)L9KDuQ$<8k-}VP-3A{DHmf89To~{&Kp0W5-wa@RqoL|M&LbUVFipHW{pho`09{BE9Mf*f*peP5Q!I;ZELH&exyX15cyZ*$;jz^v>;(e3H9=AN6*"
    b"*7W)`=a{guk)ipjRM>s3*_zQMDwnWd-yDp;qlM`N!S)qQ#+6>mOBKDm=?^7TBBzTOWmOT#r_7=SJ_5TZo>XlLUSyS(TOzn@We2}RBHH7X6`qwGUS3"
    b"-}2gfMX^>C+FXcM9i+AE-WZA0slpX#BfQc)K6pVy}s}(E-Z;a&E{nd>DHV*zq;#)mC!o-?_4beiIJbGX?LTBK~(8`dqC16c3OgCwnI(M?&k{1n;K*"
    b"PC5z9G}ODXLHWS({sc980$7*xW!1;0!1Irh$C$)LjowdHdhb;U`!V&!lAok*c2qq*2l*bOzOPC+;{Rn5>J7%||EDs^Rsx>hrv6%VPpx3rFZuei-1K"
    b"?lI_^0?;_qCvhUr=XI(G4Ad*OZ?^Pk_yZ`BBw%U;L-l+Bw#aPv=pUgp05?8$zU"
)


def known_class(spec: dict[str, Any]) -> str | None:
    """Return the class of a tokenizer, such as ``llama3+nfc``; None if gigatoken is not known to give its ids."""
    model, step, added = spec["model"], spec.get("pre_tokenizer"), spec["added_tokens"]
    normalizer, normalized = spec.get("normalizer"), {bool(token.get("normalized")) for token in added}
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if (
        model.get("type") != "BPE"
        or any(map(model.get, options))
        or normalizer not in (None, {"type": "NFC"})
        or any(len(token["content"].encode()) > LONGEST_ADDED_NBYTES for token in added)
        or any(token.get(flag) for token in added for flag in ("single_word", "lstrip", "rstrip"))
        or (True in normalized and (normalizer is not None or False in normalized))
        or step is None
    ):
        return None

    def holds(found: dict[str, Any], **wanted: Any) -> bool:
        return all(found.get(key) == value for key, value in wanted.items())

    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    suffix = "+nfc" if normalizer else ""
    if holds(step, **byte_level) and step.get("use_regex", True):
        return f"gpt2{suffix}"
    parts = step.get("pretokenizers") if step.get("type") == "Sequence" else None
    if parts and len(parts) == 2 and holds(parts[1], **byte_level, use_regex=False):
        for name, pattern in KNOWN_SPLITS.items():
            if holds(parts[0], type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False):
                return f"{name}{suffix}"
    return None


@lru_cache(maxsize=1)
def settled() -> NDArray[np.bool_]:
    """Return for each code point whether it is old enough for every library's Unicode tables; bool [0x110000]."""
    counts = np.frombuffer(zlib.decompress(b85decode(ASSIGNED)), "<u4")
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts)
