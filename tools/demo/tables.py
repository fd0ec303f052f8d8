"""What the demo chats talk about. Lists only; make_chats.py makes chats of them."""

from __future__ import annotations

CITIES = [
    *(
        "Oslo",
        "Lagos",
        "Lima",
        "Zürich",
        "Reykjavík",
        "Kraków",
        "São Paulo",
        "İstanbul",
        "Hà Nội",
        "Montréal",
    ),
    *(
        "Αθήνα",
        "Київ",
        "تهران",
        "القاهرة",
        "ירושלים",
        "दिल्ली",
        "ঢাকা",
        "กรุงเทพฯ",
        "東京",
        "北京",
        "서울",
        "თბილისი",
    ),
]

# (from, to, how many of the second one of the first is)
UNITS = [
    ("miles", "kilometres", 1.609344),
    ("kilometres", "miles", 0.621371),
    ("pounds", "kilograms", 0.453592),
    ("kilograms", "pounds", 2.204623),
    ("inches", "centimetres", 2.54),
    ("feet", "metres", 0.3048),
    ("US gallons", "litres", 3.785412),
    ("hours", "minutes", 60),
    ("nautical miles", "kilometres", 1.852),
    ("hectares", "acres", 2.471054),
]

PHRASES = ["hello", "thank you", "good morning", "good night"]
GREETINGS = {
    "Arabic": ["مرحبا", "شكرا", "صباح الخير", "تصبح على خير"],
    "Armenian": ["բարև", "շնորհակալություն", "բարի լույս", "բարի գիշեր"],
    "Bengali": ["নমস্কার", "ধন্যবাদ", "সুপ্রভাত", "শুভ রাত্রি"],
    "Chinese": ["你好", "谢谢", "早上好", "晚安"],
    "French": ["bonjour", "merci", "bonjour", "bonne nuit"],
    "Georgian": ["გამარჯობა", "მადლობა", "დილა მშვიდობისა", "ღამე მშვიდობისა"],
    "German": ["hallo", "danke", "guten Morgen", "gute Nacht"],
    "Greek": ["γεια σου", "ευχαριστώ", "καλημέρα", "καληνύχτα"],
    "Hebrew": ["שלום", "תודה", "בוקר טוב", "לילה טוב"],
    "Hindi": ["नमस्ते", "धन्यवाद", "सुप्रभात", "शुभ रात्रि"],
    "Japanese": ["こんにちは", "ありがとう", "おはよう", "おやすみなさい"],
    "Korean": ["안녕하세요", "감사합니다", "좋은 아침입니다", "안녕히 주무세요"],
    "Persian": ["سلام", "متشکرم", "صبح بخیر", "شب بخیر"],
    "Polish": ["cześć", "dziękuję", "dzień dobry", "dobranoc"],
    "Russian": ["привет", "спасибо", "доброе утро", "спокойной ночи"],
    "Spanish": ["hola", "gracias", "buenos días", "buenas noches"],
    "Swahili": ["hujambo", "asante", "habari za asubuhi", "usiku mwema"],
    "Tamil": ["வணக்கம்", "நன்றி", "காலை வணக்கம்", "இனிய இரவு"],
    "Thai": ["สวัสดี", "ขอบคุณ", "อรุณสวัสดิ์", "ราตรีสวัสดิ์"],
    "Turkish": ["merhaba", "teşekkür ederim", "günaydın", "iyi geceler"],
    "Ukrainian": ["привіт", "дякую", "доброго ранку", "на добраніч"],
    "Vietnamese": ["xin chào", "cảm ơn", "chào buổi sáng", "chúc ngủ ngon"],
}

# (name, symbol, atomic number)
ELEMENTS = [
    *(
        ("hydrogen", "H", 1),
        ("helium", "He", 2),
        ("carbon", "C", 6),
        ("nitrogen", "N", 7),
        ("oxygen", "O", 8),
    ),
    *(
        ("neon", "Ne", 10),
        ("sodium", "Na", 11),
        ("silicon", "Si", 14),
        ("sulfur", "S", 16),
        ("iron", "Fe", 26),
    ),
    *(
        ("copper", "Cu", 29),
        ("silver", "Ag", 47),
        ("tin", "Sn", 50),
        ("tungsten", "W", 74),
        ("gold", "Au", 79),
    ),
]

WORDS = [
    *("river", "lantern", "apple", "zebra", "mountain", "violin", "button", "harbour", "pepper", "window"),
    *(
        "bicycle",
        "cinnamon",
        "thunder",
        "ladder",
        "marble",
        "orchard",
        "saddle",
        "tulip",
        "umbrella",
        "walnut",
    ),
]

FACTS = [
    ("What is the capital of Norway?", "Oslo."),
    (
        "Which planet has the most moons?",
        "Saturn. More than a hundred of its moons are known; Jupiter comes second.",
    ),
    (
        "Why is the sky blue?",
        "Air scatters short wavelengths of sunlight more than long ones, so blue reaches us from all over.",
    ),
    ("How many legs does a spider have?", "Eight. Insects have six."),
    ("What does HTTP stand for?", "HyperText Transfer Protocol."),
    ("Who wrote *Pride and Prejudice*?", "Jane Austen; it appeared in 1813."),
    ("What's the largest ocean?", "The Pacific. It covers about a third of the Earth's surface. 🌊"),
    (
        "At what temperature does water boil?",
        "At 100 °C (212 °F) at sea level, and lower the higher you climb.",
    ),
    ("What is the square root of 2?", "√2 ≈ 1.41421. It is irrational, so its digits never repeat."),
    (
        "What is a leap year?",
        "A year with 29 February. Years divisible by 4 are, except centuries not divisible by 400.",
    ),
    ("What is the longest bone in the body?", "The femur, the thigh bone."),
    ("How far away is the Moon?", "About 384,000 km on average, a little over one light-second. 🌕"),
    ("Which language has the most native speakers?", "Mandarin Chinese (普通话), followed by Spanish."),
    (
        "What is sourdough?",
        "Bread raised by wild yeast and lactic bacteria living in a flour-and-water starter. 🍞",
    ),
    (
        "How do bees find flowers?",
        "By colour, patterns in ultraviolet, and scent; and they tell each other the way by dancing. 🐝",
    ),
    ("What is π to ten digits?", "3.141592653 (ten digits, cut rather than rounded)."),
    ("Which is heavier, a kilogram of feathers or of lead?", "Neither: both weigh one kilogram."),
    (
        "What causes tides?",
        "Mostly the Moon's gravity, which pulls the near side of the ocean more than the far side; the Sun helps.",
    ),
    ("Что такое самовар?", "Самовар — это сосуд для кипячения воды к чаю, традиционный для русской кухни."),
    ("¿Cuál es la capital de Perú?", "Lima."),
    ("日本で一番高い山は何ですか。", "富士山です。標高は3,776メートルです。"),
    ("ما هي عاصمة مصر؟", "القاهرة."),
    ("מהי בירת צרפת?", "פריז."),
    ("भारत की राजधानी क्या है?", "नई दिल्ली।"),
]

# (request, answer, follow-up, its answer)
SNIPPETS = [
    (
        "Write a Python function that reverses the words of a sentence.",
        '```python\ndef reverse_words(sentence: str) -> str:\n    return " ".join(reversed(sentence.split()))\n```',
        "What happens to double spaces?",
        "They become single spaces. `split()` without an argument cuts at any run of white space.",
    ),
    (
        "How do I count the lines of all .py files here in bash?",
        "```bash\nfind . -name '*.py' -print0 | xargs -0 cat | wc -l\n```",
        "Why -print0?",
        "File names may hold spaces or newlines. With `-print0` and `-0` they are separated by a zero byte, which no name holds.",
    ),
    (
        "SQL: the three customers who spent most?",
        "```sql\nSELECT customer, SUM(amount) AS spent\nFROM orders\nGROUP BY customer\nORDER BY spent DESC\nLIMIT 3;\n```",
        "Only those above 100?",
        "Add a `HAVING` line after `GROUP BY customer`:\n\n```sql\nHAVING SUM(amount) > 100\n```",
    ),
    (
        "Is a string a palindrome? In C++ please.",
        "```cpp\nbool is_palindrome(const std::string& s) {\n  return std::equal(s.begin(), s.begin() + s.size() / 2, s.rbegin());\n}\n```",
        "Does the empty string count?",
        "Yes. The range is empty, and `std::equal` of an empty range is true.",
    ),
    (
        "Give me FizzBuzz in Python, up to 15.",
        '```python\nfor n in range(1, 16):\n    print("Fizz" * (n % 3 == 0) + "Buzz" * (n % 5 == 0) or n)\n```',
        "How does the multiplication work?",
        'A string times a bool is itself or empty. `"Fizz" * True` is `"Fizz"`, `"Fizz" * False` is `""`, and `or n` covers the rest.',
    ),
    (
        "What does this print?\n\n```python\nx = [1, 2, 3]\ny = x\ny.append(4)\nprint(x)\n```",
        "`[1, 2, 3, 4]`: `y = x` gives the same list a second name.",
        "How do I copy it instead?",
        "Write `y = x.copy()` or `y = x[:]`. Both copy the list, not the things in it.",
    ),
    (
        "Read a JSON file and print its keys, sorted.",
        '```python\nimport json\nfrom pathlib import Path\n\ndata = json.loads(Path("data.json").read_text(encoding="utf-8"))\nprint("\\n".join(sorted(data)))\n```',
        "And if the file is a list?",
        "Then `sorted(data)` sorts the items. Check `isinstance(data, dict)` first if both can happen.",
    ),
    (
        "Regex for a time like 09:45?",
        "`^([01]\\d|2[0-3]):[0-5]\\d$` matches 00:00 to 23:59.",
        "What is the first group for?",
        "It allows hours 00 to 19 or 20 to 23. Without it, 29:00 would pass.",
    ),
    (
        "How do I undo my last git commit but keep the changes?",
        "```bash\ngit reset --soft HEAD~1\n```\n\nThe changes stay staged.",
        "And without --soft?",
        "Then they stay in the files but leave the index. `--hard` would throw them away.",
    ),
    (
        "Show a JavaScript debounce.",
        "```js\nconst debounce = (f, ms) => {\n  let timer;\n  return (...args) => {\n    clearTimeout(timer);\n    timer = setTimeout(() => f(...args), ms);\n  };\n};\n```",
        "When does f run?",
        "Once calls have stopped for `ms` milliseconds. Every call before that starts the wait again.",
    ),
]

# Hard on tokenizers: combining marks, joined emoji, mixed directions, control tokens spelled in plain text.
ODDITIES = [
    (
        "Is é one character or two?",
        "It can be both: é is U+00E9, and e\u0301 is e followed by U+0301, a combining acute accent. "
        "NFC turns the second form into the first.",
    ),
    (
        "Stack some accents on an o for me.",
        "o\u0302\u0323 has two marks, o\u0302\u0323\u0308\u0304 has four. Whether they stack well is up to the font.",
    ),
    (
        "What is 👩\u200d👩\u200d👧\u200d👦 made of?",
        "Four people, 👩 👩 👧 👦, joined by U+200D, the zero-width joiner. Likewise 🏳️\u200d🌈 is 🏳️ joined to 🌈, "
        "and 👍🏽 is 👍 with a skin tone.",
    ),
    (
        "Which flags are 🇯🇵🇧🇷🇰🇪?",
        "Japan 🇯🇵, Brazil 🇧🇷 and Kenya 🇰🇪. Each is two regional letters, such as 🇯 and 🇵.",
    ),
    (
        "Write 'peace' in Arabic and Hebrew in one sentence.",
        "Arabic says سلام (salām) and Hebrew says שלום (shalom): \u2067سلام, שלום\u2069, two words of one root.",
    ),
    (
        "What is the token <|im_end|> for?",
        "In ChatML, <|im_end|> closes a turn and <|im_start|> opens one. Typed in a message, they are only text.",
    ),
    (
        "My log ends with <|endoftext|>. Is that a bug?",
        "Probably the model's end-of-text token was printed: look for a decoder called without skipping special tokens.",
    ),
    (
        "Translate 'rainbow' to Hawaiian, with the okina.",
        "Ānuenue. A word with an ʻokina would be Hawaiʻi itself.",
    ),
    ("数学：∑ 从 1 到 100 是多少？", "∑ₙ₌₁¹⁰⁰ n = 100·101/2 = 5050。"),
    ("Draw a tiny box.", "```\n┌──┐\n│  │\n└──┘\n```"),
    ("Say nothing but a rocket.", "🚀"),
    ("1️⃣ + 2️⃣ = ?", "3️⃣"),
]
